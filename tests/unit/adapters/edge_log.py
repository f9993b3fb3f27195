"""Record the edges of modules, and check what holds for all of them."""


class EdgeLog:
    """Edges as words, in order: 'f+ m' and 'f- m' for a forward's begin and end, 'b+ m' and 'b- m' for a backward's."""

    def __init__(self):
        self.words = []

    def forward_begin(self, module):
        self.words.append(f"f+ {module}")

    def forward_end(self, module):
        self.words.append(f"f- {module}")

    def backward_begin(self, module):
        self.words.append(f"b+ {module}")

    def backward_end(self, module):
        self.words.append(f"b- {module}")

    def taken(self):
        """What was reported since the last call. Checked: all that began has ended, the last begun first."""
        words, self.words = self.words, []
        running = []
        for word in words:
            if "+" in word:
                running.append(word.replace("+", "-"))
            else:
                assert running.pop() == word, words
        assert not running, words
        return words


def forward(*modules):
    """The forwards of modules, one after another."""
    return [word for module in modules for word in (f"f+ {module}", f"f- {module}")]


def backward(*modules):
    """The backwards of modules, one after another."""
    return [word for module in modules for word in (f"b+ {module}", f"b- {module}")]
