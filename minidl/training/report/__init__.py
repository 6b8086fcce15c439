"""Reports of a finished run: scores, baselines, plots and report.html.

Read `report_files` first (report.json and report.txt), then `metrics`, `baselines`, `page` (report.html), `plots`,
`plot_processes`, `samples` and `compare`.
"""
