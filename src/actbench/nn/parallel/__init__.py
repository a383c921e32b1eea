"""A model that several processes train together: copies, shares of its parameters, shares of its optimizer state."""
