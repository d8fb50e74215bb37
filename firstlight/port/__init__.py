"""The porting workbench: decompose an unknown model, draft its port, say what is left, report."""
