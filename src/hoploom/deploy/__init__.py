"""One command -> processes on one or many hosts: a cluster file, and who starts what it describes."""
