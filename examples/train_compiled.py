"""train.py with a compiled model."""

import train


class CompiledGPT(train.GPT):
    """A GPT that torch compiles when it is first called."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.compile()


if __name__ == "__main__":
    train.GPT = CompiledGPT
    train.main()
