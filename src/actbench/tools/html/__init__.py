"""One HTML file without a network: tables that sort and filter, charts, and the settings and command of each row."""
