"""Our rollouts inside other people's trainers. A host is imported only by whoever asks for it."""
