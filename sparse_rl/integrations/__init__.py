"""Our rollouts and corrections inside other trainers: a module per host, over the same pure functions as our own learner.

None is imported by the rest of the package, and a host is imported only by its own module.
"""
