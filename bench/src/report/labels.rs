//! Places for labels where they do not cover each other.

/// Places as near to those wanted as keeps them apart by `gap`, between `low` and `high`. None where they do not fit.
pub(super) fn spread(wanted: &[f64], gap: f64, low: f64, high: f64) -> Option<Vec<f64>> {
    if wanted.len().saturating_sub(1) as f64 * gap > high - low {
        return None;
    }
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
    let mut places = wanted.to_vec();
    let mut least = low;
    for &at in &order {
        places[at] = places[at].max(least);
        least = places[at] + gap;
    }
    let mut most = high;
    for &at in order.iter().rev() {
        places[at] = places[at].min(most);
        most = places[at] - gap;
    }
    Some(places)
}

/// A rectangle in pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Area {
    /// Around a point.
    pub(super) fn around((x, y): (f64, f64), by: f64) -> Self {
        Self { left: x - by, top: y - by, right: x + by, bottom: y + by }
    }

    /// Whether both cover something.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    /// Whether it covers all of another.
    pub(super) fn holds(&self, other: &Self) -> bool {
        self.left <= other.left
            && other.right <= self.right
            && self.top <= other.top
            && other.bottom <= self.bottom
    }
}

/// The first place beside a point for a label of this size, where nothing is taken yet.
pub(super) fn beside(
    (x, y): (f64, f64),
    (width, height): (f64, f64),
    within: &Area,
    taken: &[Area],
) -> Option<Area> {
    let away = 8.0;
    let most = (within.right - width).max(within.left);
    let middle_x = (x - width / 2.0).clamp(within.left, most);
    let middle_y = y - height / 2.0;
    let (above, below) = (y - away - height, y + away);
    let (right, left) = (x + away, x - away - width);
    let corners = [
        (right, middle_y),
        (middle_x, above),
        (middle_x, below),
        (left, middle_y),
        (right - 3.0, above + 3.0),
        (right - 3.0, below - 3.0),
        (left + 3.0, above + 3.0),
        (left + 3.0, below - 3.0),
    ];
    let areas =
        corners.map(|(left, top)| Area { left, top, right: left + width, bottom: top + height });
    areas
        .into_iter()
        .find(|area| within.holds(area) && !taken.iter().any(|other| other.overlaps(area)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn labels_stay_where_they_have_room() {
        assert_eq!(spread(&[50.0, 10.0], 14.0, 0.0, 100.0), Some(vec![50.0, 10.0]));
        assert_eq!(spread(&[1.0, 2.0, 3.0], 14.0, 0.0, 20.0), None);
    }

    proptest! {
        #[test]
        fn labels_are_kept_apart(wanted in prop::collection::vec(0.0f64..100.0, 0..8)) {
            let places = spread(&wanted, 14.0, 0.0, 100.0).unwrap();
            for (at, place) in places.iter().enumerate() {
                prop_assert!((-1e-9..=100.0 + 1e-9).contains(place));
                prop_assert!(places[..at].iter().all(|other| (other - place).abs() > 14.0 - 1e-9));
            }
        }

        #[test]
        fn no_label_covers_another(points in prop::collection::vec((0.0f64..300.0, 0.0f64..200.0), 1..20)) {
            let within = Area { left: 0.0, top: 0.0, right: 300.0, bottom: 200.0 };
            let mut taken: Vec<Area> = Vec::new();
            for point in points {
                if let Some(area) = beside(point, (60.0, 14.0), &within, &taken) {
                    prop_assert!(within.holds(&area) && !taken.iter().any(|other| other.overlaps(&area)));
                    taken.push(area);
                }
            }
        }
    }
}
