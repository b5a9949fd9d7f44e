"""Engines of others: what runs Flyweight inside them."""
