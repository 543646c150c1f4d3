"""The process that learns and samples on the same weights. All modules here import torch, or run where it is."""
