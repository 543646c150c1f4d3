"""`python -m agentjet.cli`."""

from agentjet.cli.main import main

main()
