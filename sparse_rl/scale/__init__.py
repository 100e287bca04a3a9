"""The scale model: model.py predicts the time of a step on many GPUs, lengths.py draws response lengths."""
