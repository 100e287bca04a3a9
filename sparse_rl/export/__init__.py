"""Export a checkpoint as a plain Hugging Face folder with a model card, for other programs, machines and people."""

from .folder import export, push

__all__ = ["export", "push"]
