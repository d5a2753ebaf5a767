//! The ulp histogram of a failure.

use m3_gate::UlpHistogram;

/// Distances in representable values, on a logarithmic scale so that a single element shows.
pub(crate) fn histogram(h: &UlpHistogram) -> String {
    const WIDTH: f64 = 260.0;
    let buckets = [
        ("0", h.zero),
        ("1", h.one),
        ("2", h.two),
        ("3-4", h.three_to_four),
        ("5+", h.five_up),
    ];
    let logs = buckets.map(|(_, count)| (1.0 + count as f64).log10());
    let top = logs
        .iter()
        .fold(1.0, |top: f64, &log| if log > top { log } else { top });
    let mut rows = String::new();
    for (i, ((name, count), log)) in buckets.iter().zip(logs).enumerate() {
        let (y, width) = (18 * i, WIDTH * log / top);
        rows += &format!(
            "<text x=\"0\" y=\"{}\">{name}</text>\
             <rect class=\"bar\" x=\"40\" y=\"{y}\" width=\"{width:.1}\" height=\"14\"/>\
             <text x=\"{:.1}\" y=\"{}\">{count}</text>",
            y + 12,
            46.0 + width,
            y + 12
        );
    }
    format!(
        "<figure><svg viewBox=\"0 0 400 92\" role=\"img\" aria-label=\"ulp histogram\">{rows}</svg>\
         <figcaption>elements by distance in representable values (log scale)</figcaption></figure>\n"
    )
}
