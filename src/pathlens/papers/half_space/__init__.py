"""Experiments of 'Half-Space Feature Learning' and of the questions that its summary asks."""
