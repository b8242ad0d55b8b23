"""Answers to the exercises, wrong and right, one module for each exercise: see `test_zoo`."""


def answers():
    """Return (WRONG, RIGHT, wrong, right) for a module of the zoo.

    WRONG is {function: what its message must hold}, RIGHT a list; @wrong("…") and @right fill them.
    """
    found_wrong, found_right = {}, []

    def wrong(message):
        def keep(fn):
            found_wrong[fn] = message
            return fn

        return keep

    def right(fn):
        found_right.append(fn)
        return fn

    return found_wrong, found_right, wrong, right
