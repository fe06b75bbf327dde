"""What models and files say, fit for a terminal or an error: names may have any characters, of any number."""

_MAX_CHARACTERS = 4000
_END_CHARACTERS = 1000


def printable(text: object) -> str:
    """One line of it, with a question mark for each character that is none to be seen.

    Escape codes among them, which would have a terminal do things.
    """
    return "".join(character if character.isprintable() else "?" for character in str(text))


def shortened(text: str) -> str:
    """A text whose middle is left out where it is too long to be read."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    first = _MAX_CHARACTERS - _END_CHARACTERS
    left_out = len(text) - _MAX_CHARACTERS
    return f"{text[:first]} [{left_out} characters left out] {text[-_END_CHARACTERS:]}"


def quotable(exc: Exception) -> Exception | None:
    """An exception, to be the cause of another one; None where its text is too long for a traceback."""
    return exc if len(str(exc)) <= _MAX_CHARACTERS else None
