"""Start the processes of one command on one or many hosts: cluster files, launchers, and `hoploom.open`."""
