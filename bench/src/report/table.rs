//! The figures of all runs in one table.

use super::number::{NONE, decimal, figure, percent, times};
use super::panel::Panel;
use super::text::escape;
use crate::quantiles::Quantiles;
use crate::results::Run;

/// Columns below the headings.
const COLUMNS: usize = 12;

/// One row a run, under a heading for its endpoint and temperature.
pub(super) fn summary(panels: &[Panel<'_>]) -> String {
    let bodies: String = panels.iter().map(body).collect();
    format!(
        r#"<div class="scroll" tabindex="0" role="region" aria-label="All runs">
<table class="summary">
<thead>
<tr><th scope="col" rowspan="2">Drafts</th><th scope="col" rowspan="2" class="load">Load</th><th scope="col" rowspan="2">Tokens/s</th><th scope="col" rowspan="2">Speed-up</th><th scope="colgroup" colspan="2">First token, ms</th><th scope="colgroup" colspan="2">Time a token, ms</th><th scope="col" rowspan="2">Tokens<br>a step</th><th scope="col" rowspan="2">Accept&shy;ance</th><th scope="col" rowspan="2">Same<br>text</th><th scope="col" rowspan="2">Failed</th></tr>
<tr><th scope="col">p50</th><th scope="col">p99</th><th scope="col">p50</th><th scope="col">p99</th></tr>
</thead>
{bodies}</table>
</div>
"#
    )
}

fn body(panel: &Panel<'_>) -> String {
    let setting = &panel.runs[0].setting;
    let (endpoint, temperature) = (escape(&setting.endpoint), setting.temperature);
    let mut body = format!(
        "<tbody>\n<tr class=\"group\"><th scope=\"rowgroup\" colspan=\"{COLUMNS}\"><span>{endpoint}, temperature {temperature}</span></th></tr>\n"
    );
    for (_, runs) in panel.by_load() {
        let speeds = runs.iter().map(|run| run.pace());
        let fastest = speeds.filter(|speed| speed.is_finite()).fold(0.0, f64::max);
        for (at, run) in runs.iter().enumerate() {
            let is_fastest = runs.len() > 1 && fastest > 0.0 && run.pace() == fastest;
            body += &row(run, is_fastest, at == 0);
        }
    }
    body + "</tbody>\n"
}

fn row(run: &Run, is_fastest: bool, is_first: bool) -> String {
    let (setting, latency) = (&run.setting, &run.latency);
    let (drafts, load) = (escape(&setting.drafts()), escape(&setting.load.to_string()));
    let speculation = run.speculation.as_ref();
    let failed: usize = run.failed.iter().map(|(_, count)| count).sum();
    let cells = [
        ("speed", figure(run.tokens_per_second)),
        ("speed", speed_up(run)),
        ("", percentile(&latency.first_token, 50)),
        ("", percentile(&latency.first_token, 99)),
        ("", percentile(&latency.per_token, 50)),
        ("", percentile(&latency.per_token, 99)),
        ("", speculation.map_or(NONE.into(), |of| figure(of.tokens_per_step()))),
        ("", speculation.and_then(|of| of.acceptance()).map_or(NONE.into(), percent)),
        ("", run.same_text.map_or(NONE.into(), percent)),
        (if failed > 0 { "bad" } else { "" }, decimal(failed as f64, 0)),
    ];
    let cell = |(class, text): &(&str, String)| match *class {
        "" => format!("<td>{text}</td>"),
        class => format!("<td class=\"{class}\">{text}</td>"),
    };
    let classes = [("fastest", is_fastest), ("first", is_first)];
    let classes: Vec<&str> = classes.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
    format!(
        "<tr class=\"{}\"><th scope=\"row\">{drafts}<small>{load}</small></th><td class=\"load\">{load}</td>{}</tr>\n",
        classes.join(" "),
        cells.iter().map(cell).collect::<String>()
    )
}

/// With the least and the most of its rounds below it.
fn speed_up(run: &Run) -> String {
    let median = run.speed_up.map_or(NONE.into(), times);
    match run.speed_up_range() {
        Some((least, most)) => {
            format!("{median}<small>{} to {}</small>", decimal(least, 2), decimal(most, 2))
        }
        None => median,
    }
}

fn percentile(times: &Quantiles, percent: usize) -> String {
    if times.count == 0 { NONE.into() } else { figure(times.at(percent)) }
}
