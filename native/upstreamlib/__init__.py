"""What upstream.py is made of. Standard library only: it runs before there is a virtual environment."""
