"""The command line: argv to configuration, exit codes, and what people read. Nothing else.

Modules of sub-commands are imported one at a time, and import the engine only once the arguments
are known to be right: a mistake is answered at once.
"""
