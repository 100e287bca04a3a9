"""The scale model: model.py predicts the time of a step on many GPUs, pool.py with a pool of samplers, and lengths.py
draws response lengths.
"""
