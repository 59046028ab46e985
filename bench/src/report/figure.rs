//! A plot with its title, its legend and its drawings for several widths.

use super::palette::Style;
use super::svg::swatch;
use super::text::escape;

/// A line of a legend.
pub(super) type Entry<'a> = (&'a Style, &'a str);

/// `note` may be empty.
pub(super) fn figure(title: &str, note: &str, legend: &[Entry<'_>], images: &str) -> String {
    let note = match note {
        "" => String::new(),
        note => format!("<p class=\"note\">{}</p>", escape(note)),
    };
    let entry = |(style, name): &Entry<'_>| {
        format!("<li>{}{}</li>", swatch(&style.class, style.shape), escape(name))
    };
    let entries: String = legend.iter().map(entry).collect();
    format!(
        "<figure>\n<figcaption><h3>{}</h3>{note}<ul class=\"legend\">{entries}</ul></figcaption>\n{images}</figure>\n",
        escape(title)
    )
}
