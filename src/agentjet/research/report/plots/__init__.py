"""The figures of a report, drawn by matplotlib from a study's proceedings. Imported only when a report is built."""
