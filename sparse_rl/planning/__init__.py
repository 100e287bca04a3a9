"""Memory plans: memory.py of a rollout, training.py of a training run. Plans import no engine."""
