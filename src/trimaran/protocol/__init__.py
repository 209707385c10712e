"""The protocol between ranks and those who start and watch them: jobs, phases, files, exit statuses, environment."""
