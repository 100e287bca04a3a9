"""`sparse-rl serve`: an OpenAI server on the compressed cache that a model was trained for."""
