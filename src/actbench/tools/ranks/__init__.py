"""Cases measured by processes that were launched together: the first one leads, and the others follow its orders."""
