"""Tables that ship with the package: serve/ holds whole configurations."""
