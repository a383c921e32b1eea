"""Recipes that ship with actbench, one question each; read as package data."""
