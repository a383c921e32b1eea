"""CUDA sources, one per op family; read as package data."""
