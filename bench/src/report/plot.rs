//! The area of a plot with its axes.

use super::axis::Axis;
use super::svg::{Anchor, Svg};
use super::text::width;

/// As in `style.css`.
pub(super) const FONT_SIZE: f64 = 12.0;
/// From the axis to its ticks' names, and between names.
const GAP: f64 = 8.0;
/// Above the area: the name of the upright axis.
const TOP: f64 = 30.0;
/// Below it: ticks' names and the name of the level axis.
const BOTTOM: f64 = 44.0;

/// What is drawn for one width of the page, in pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Of the style sheet, which shows it where it fits.
    pub(super) class: &'static str,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Beside another one on a page that is wide enough.
pub(super) const WIDE: Size = Size { class: "wide", width: 540.0, height: 320.0 };
/// Over the whole width of a telephone.
pub(super) const NARROW: Size = Size { class: "narrow", width: 350.0, height: 280.0 };
/// Three in a row, or over the whole width of a telephone.
pub(super) const SMALL: Size = Size { class: "small", width: 350.0, height: 260.0 };
/// Over the whole width of a page at a desk.
pub(super) const FULL: Size = Size { class: "broad", width: 1100.0, height: 460.0 };

/// An axis and what it shows, with the unit.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) name: &'static str,
    pub(super) axis: Axis,
    /// Pixels at both ends, so that marks there do not stand on the other axis.
    pub(super) inset: f64,
}

/// Where values are drawn.
pub(super) struct Plot<'a> {
    pub(super) svg: Svg,
    x: &'a Named,
    y: &'a Named,
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl<'a> Plot<'a> {
    /// With axes, and at least `margin` pixels left beside the area on the right.
    pub(super) fn new(size: Size, x: &'a Named, y: &'a Named, margin: f64) -> Self {
        let widths = |axis: &Named| -> Vec<f64> {
            axis.axis.ticks.iter().map(|(_, name)| width(name, FONT_SIZE)).collect()
        };
        let half = |at: Option<&f64>| (at.unwrap_or(&0.0) / 2.0 - x.inset).max(0.0) + 2.0;
        let (across, up) = (widths(x), widths(y));
        let left = (up.iter().copied().fold(0.0, f64::max) + GAP + 2.0).max(half(across.first()));
        let right = size.width - margin.max(half(across.last()));
        let svg = Svg::new(size.width, size.height);
        let mut plot = Self { svg, x, y, left, right, top: TOP, bottom: size.height - BOTTOM };
        plot.upright();
        plot.level(&across);
        plot
    }

    /// Of a value.
    pub(super) fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let (left, right) = (self.left + self.x.inset, self.right - self.x.inset);
        let (top, bottom) = (self.top + self.y.inset, self.bottom - self.y.inset);
        let (across, up) = (self.x.axis.share(x), self.y.axis.share(y));
        (left + across * (right - left), bottom - up * (bottom - top))
    }

    fn upright(&mut self) {
        self.svg.text("name", (2.0, FONT_SIZE + 1.0), Anchor::Start, self.y.name);
        for (value, name) in &self.y.axis.ticks {
            let y = self.at(0.0, *value).1;
            self.svg.line("grid", (self.left, y), (self.right, y));
            let baseline = y + FONT_SIZE * 0.35;
            self.svg.text("tick", (self.left - GAP, baseline), Anchor::End, name);
        }
    }

    /// From the right: names that would touch the one before are left out.
    fn level(&mut self, widths: &[f64]) {
        self.svg.line("axis", (self.left, self.bottom), (self.right, self.bottom));
        let mut free = self.svg.width;
        for ((value, name), width) in self.x.axis.ticks.iter().zip(widths).rev() {
            let x = self.at(*value, 0.0).0;
            self.svg.line("axis", (x, self.bottom), (x, self.bottom + 4.0));
            if x + width / 2.0 <= free {
                let baseline = self.bottom + 6.0 + FONT_SIZE;
                self.svg.text("tick", (x, baseline), Anchor::Middle, name);
                free = x - width / 2.0 - GAP;
            }
        }
        let below = (self.right, self.svg.height - 6.0);
        self.svg.text("name", below, Anchor::End, self.x.name);
    }
}
