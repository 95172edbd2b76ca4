# mokd.conf(5) from the sample configuration: a comment, then the keys that it is about.
function paragraph(    i)
{
    for (i = 1; i <= n; i++)
        print text(line[i])
    n = 0
}
BEGIN {
    title("mokd.conf", 5, "configuration of mokd")
    print ".SH SYNOPSIS\n" bold("/etc/mok/mokd.conf")
    print ".SH DESCRIPTION"
    print "Keys are given with their default, those that have none with an example; of these the text says what holds without them."
}
/^# ?/ { sub(/^# ?/, ""); if (keyed) keyed = n = 0; line[++n] = $0; next }
/^$/ {
    # a paragraph of its own
    if (!keyed && n > 0) {
        print ".PP"
        paragraph()
    }
    keyed = n = 0
    next
}
/^;?\[/ {
    sub(/^;/, "")
    saved = n
    if (seen[$0]++) {
        n = 0
        next
    }
    print ".SH \"" code($0) "\""
    if (saved) {
        n = saved
        paragraph()
    }
    keyed = 0
    next
}
/^;?[a-z_0-9]+ *=/ {
    sub(/^;/, "")
    # the next one without a comment of its own shares this one's
    if (keyed && !told) {
        print ".TQ\n" bold($0)
        next
    }
    print ".TP\n" bold($0)
    if (!keyed) {
        told = n > 0
        paragraph()
    } else if (told) {
        print "The same."
    }
    keyed = 1
    next
}
END {
    print ".SH FILES"
    print ".TP\n" bold("/etc/mok/mokd.conf") "\nWhat mokd reads, unless " bold("--config") " names another file."
    print ".SH SEE ALSO\n\\fBmokd\\fR(8), \\fBmokctl\\fR(1)"
}
