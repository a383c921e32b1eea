"""Graph networks in plain torch, trained on a whole generated graph; by default as large as ogbn-arxiv."""
