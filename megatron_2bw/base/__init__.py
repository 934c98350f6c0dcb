"""What every room uses: errors, files, processes, argv, logs."""
