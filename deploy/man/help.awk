# mokctl(1) from what mokctl --help says.
BEGIN {
    title("mokctl", 1, "look at mokd, and tell it what to do")
    print ".SH SYNOPSIS"
}
/^usage: / { sub(/^usage: /, ""); print bold($0); next }
/^[a-z][a-z ]*:$/ { sub(/:$/, ""); print ".SH " toupper($0); next }
/^[a-z][a-z ]*: / {
    print ".SH " toupper(substr($0, 1, index($0, ":") - 1))
    sub(/^[a-z ]+: /, "")
    gsub(/, /, "\n.br\n")
    print text($0)
    next
}
/^  [^ ]/ {
    entry = $0
    sub(/^  /, "", entry)
    rest = ""
    if (match(entry, /  +/)) {
        rest = substr(entry, RSTART + RLENGTH)
        entry = substr(entry, 1, RSTART - 1)
    }
    print ".TP\n" bold(entry)
    if (rest != "")
        print text(rest)
    next
}
/^ +/ { sub(/^ +/, ""); print text($0); next }
END {
    print ".SH ENVIRONMENT"
    print ".TP\n" bold("MOK_SOCKET") "\nWhere mokd listens, for mokctl and for every program that uses libmok."
    print ".SH SEE ALSO\n\\fBmokd\\fR(8), \\fBmokd.conf\\fR(5), \\fBlibmok\\fR(3)"
}
