"""The elastic controller: senses, decides, orders. Never touches tensors."""
