"""Optuna studies that propose and show a sweep's arms. The only folder that imports Optuna and its dashboard.

`study` proposes points and records results; `journal` is the study's file; `annotations` adds notes and
figures; `combined_storage` shows the journals of all sweeps in one dashboard.
"""
