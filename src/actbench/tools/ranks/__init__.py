"""Cases measured by processes that were launched together: the first one asks, the others do as they are told."""
