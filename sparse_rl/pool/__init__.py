"""Samplers that come and go: who samples what, what happens when one is lost, and how they are reached.

pieces.py says what is asked for, ledger.py who has it (pure code), pool.py drives members that a transport reaches,
worker.py is a member's side, and cluster.py is the transport over Ray. No room of ours is imported here: what a member
computes is its `Hands`, which train/remote.py makes from a recipe.
"""
