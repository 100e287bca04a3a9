"""`python -m sparse_rl` is `sparse-rl`, for launchers of modules: accelerate launch -m sparse_rl train RECIPE."""

from .cli.main import main

if __name__ == "__main__":
    main()
