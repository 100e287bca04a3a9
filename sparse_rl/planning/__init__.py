"""Memory plans, for a rollout (memory.py) and for a training run (training.py). Plans do not import the engine."""
