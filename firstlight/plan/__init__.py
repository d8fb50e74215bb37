"""Binds every operator of every layer to a body, with the reason; estimates memory and traffic."""
