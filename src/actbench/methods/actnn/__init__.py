"""ActNN: layers pack their input in groups of few bits (Chen et al., arXiv 2104.14129)."""
