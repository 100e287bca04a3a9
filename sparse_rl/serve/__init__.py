"""`sparse-rl serve`: a server of OpenAI's protocol that runs a model on the compressed cache of its training."""
