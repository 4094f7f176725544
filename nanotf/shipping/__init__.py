"""How models, datasets and arrays reach the workers, and how their state comes back."""
