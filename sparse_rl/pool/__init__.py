"""A pool of samplers that may come and go: it hands out work, redoes what was lost, and reaches samplers over Ray.

pieces.py defines the pieces of work, ledger.py records who has which (pure code), pool.py drives the members through a
transport, worker.py is a member's side, and cluster.py is the transport over Ray. This folder imports no other part of
the package: what a member computes is its `Hands`, which train/remote.py makes from a recipe.
"""
