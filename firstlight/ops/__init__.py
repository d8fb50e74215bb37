"""What can be computed: one folder per operator family, each with ref.py (fp32 truth) and eager.py."""
