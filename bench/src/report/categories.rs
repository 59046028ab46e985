//! What speculation brings to prompts of each kind.

use super::axis::is_drawable;
use super::number::{NONE, decimal, figure, times};
use super::palette::Palette;
use super::panel::Panel;
use super::text::escape;
use crate::results::{Category, Run};
use crate::setting::Load;

/// A table for each load; the first one is unfolded. Empty where all prompts are of one kind.
pub(super) fn tables(panel: &Panel<'_>, palette: &Palette<'_>) -> String {
    let mut tables = String::new();
    for (load, runs) in panel.by_load() {
        let runs: Vec<&Run> = runs.into_iter().filter(|run| !run.setting.is_plain()).collect();
        let names = names(&runs);
        if names.len() >= 2 {
            tables += &table(panel, load, &runs, &names, palette, tables.is_empty());
        }
    }
    tables
}

fn names<'a>(runs: &[&'a Run]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for category in runs.iter().flat_map(|run| &run.categories) {
        if !names.contains(&category.name.as_str()) {
            names.push(&category.name);
        }
    }
    names
}

fn table(
    panel: &Panel<'_>,
    load: Load,
    runs: &[&Run],
    names: &[&str],
    palette: &Palette<'_>,
    is_open: bool,
) -> String {
    let all = || runs.iter().flat_map(|run| &run.categories);
    let (fastest, longest) = (largest(all().map(speed_up)), largest(all().map(tokens_per_step)));
    let mut bodies = String::new();
    for name in names {
        let of_name =
            |run: &&'_ Run| run.categories.iter().position(|category| category.name == *name);
        let rows: Vec<(&Run, &Category)> = runs
            .iter()
            .filter_map(|run| of_name(run).map(|at| (*run, &run.categories[at])))
            .collect();
        let mut head =
            format!("<th scope=\"rowgroup\" rowspan=\"{}\">{}</th>", rows.len(), escape(name));
        bodies += "<tbody>\n";
        for (run, category) in rows {
            let class = palette.drafts(&run.setting).class;
            bodies += &format!(
                "<tr>{head}<th scope=\"row\">{}</th>{}{}<td>{}</td><td>{}</td></tr>\n",
                escape(&run.setting.drafts()),
                bar(&class, speed_up(category), fastest, times),
                bar(&class, tokens_per_step(category), longest, figure),
                figure(category.per_token_ms),
                decimal(category.answered as f64, 0),
            );
            head.clear();
        }
        bodies += "</tbody>\n";
    }
    let open = if is_open { " open" } else { "" };
    let load = escape(&load.to_string());
    let note = match panel.name.as_str() {
        "" => String::new(),
        name => format!(" <span class=\"note\">{}</span>", escape(name)),
    };
    format!(
        r#"<details{open}>
<summary>{load}{note}</summary>
<div class="scroll" tabindex="0" role="region" aria-label="By category, {load}">
<table class="categories">
<thead><tr><th scope="col">Category</th><th scope="col">Drafts</th><th scope="col">Speed-up</th><th scope="col">Tokens a step</th><th scope="col">ms a token</th><th scope="col">Answers</th></tr></thead>
{bodies}</table>
</div>
</details>
"#
    )
}

/// A figure with a bar as long as its share of the largest, and a line where the bar of 1 ends.
fn bar(class: &str, value: Option<f64>, largest: f64, name: fn(f64) -> String) -> String {
    let Some(value) = value else { return format!("<td class=\"bar\">{NONE}</td>") };
    let share = |value: f64| (value / largest * 100.0).clamp(0.0, 100.0);
    format!(
        "<td class=\"bar\"><span class=\"value\">{}</span><span class=\"track\"><span class=\"fill {class}\" style=\"width:{:.1}%\"></span><span class=\"one\" style=\"left:{:.1}%\"></span></span></td>",
        name(value),
        share(value),
        share(1.0)
    )
}

fn speed_up(category: &Category) -> Option<f64> {
    category.speed_up.filter(|&value| is_drawable(value))
}

fn tokens_per_step(category: &Category) -> Option<f64> {
    category.speculation.as_ref().map(|of| of.tokens_per_step())
}

/// At least 1, so that its line is on every bar.
fn largest(values: impl Iterator<Item = Option<f64>>) -> f64 {
    values.flatten().fold(1.0, f64::max)
}
