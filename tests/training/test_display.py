from minidl.training.process.display import Display

FIGURES = "loss 0.5000  validation: loss 0.4000  accuracy 0.9000  macro-F1 not finite"


def test_an_epoch_is_one_plain_line_where_there_is_no_terminal(capsys):
    with Display() as display:
        display.begin(2, 10, 0, 7)
        display.step(1, "loss 0.6")
        display.epoch(2, 10, FIGURES, 1.23, star=True)
    assert capsys.readouterr().out == (
        "epoch  2/10  loss 0.5000  validation: loss 0.4000  accuracy 0.9000  macro-F1 not finite  1.2 s  *\n"
    )


def test_quiet_shows_nothing(capsys):
    with Display(quiet=True) as display:
        display.note("text")
        display.epoch(2, 10, FIGURES, 1.23, star=True)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with Display() as display:
        for epoch in (1, 2):
            display.begin(epoch, 2, 0, 3)
            display.step(1, None)
            display.step(2, "loss 0.25")
            display._bar.refresh()  # a thread does so ten times a second, if it gets a processor
            display.epoch(epoch, 2, FIGURES, 1.23)
    shown = capsys.readouterr().out
    assert "epoch 2/2" in shown
    assert "loss 0.25" in shown
