"""A training script on a card that is not there."""
