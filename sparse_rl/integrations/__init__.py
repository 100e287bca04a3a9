"""Our rollouts and corrections inside other trainers: one module per host, over the pure functions of our own learner.

The rest of the package imports none of these modules, and only a host's own module imports the host.
"""
