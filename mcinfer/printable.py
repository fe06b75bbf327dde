"""What models and files say, fit for a terminal: their names may have any characters."""


def printable(text: object) -> str:
    """One line of it, with a question mark for each character that is none to be seen.

    Escape codes among them, which would have a terminal do things.
    """
    return "".join(character if character.isprintable() else "?" for character in str(text))
