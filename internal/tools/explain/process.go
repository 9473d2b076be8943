package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/storage-controller/storage-controller/internal/tools/statusz"
)

// maxPage bounds what is read of the page of a process.
const maxPage = 8 << 20

// readProcess asks a running process for its page. address is that of its HTTP endpoint,
// with or without the path.
func readProcess(ctx context.Context, address string) *processFact {
	f := &processFact{url: address}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		f.err = errors.New("it is no URL such as http://127.0.0.1:8080")
		return f
	}
	u = u.JoinPath()
	if u.Path == "" || u.Path == "/" {
		u.Path = "/statusz"
	}
	u.RawQuery = "format=json"
	f.page, f.err = fetch(ctx, u.String())
	return f
}

func fetch(ctx context.Context, address string) (page statusz.Page, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return page, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return page, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return page, fmt.Errorf("it answers %s", response.Status)
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, maxPage)).Decode(&page); err != nil || page.Program == "" {
		return page, errors.New("what it answers is not the status page of a storage-controller")
	}
	return page, nil
}

// aboutProcess is what a running process says of the object: the loops that count its
// attempts under key, and the calls of the driver for one of volumes.
func (f *facts) aboutProcess(roles, loops []string, key string, volumes ...string) findings {
	var l findings
	p := f.process
	if p == nil {
		return l
	}
	if p.err != nil {
		l.add(Unknown, "process", "", "The process at %s could not be asked: %s", p.url, sentence(p.err.Error()))
		return l
	}
	for _, r := range p.page.Roles {
		if slices.Contains(roles, r.Name) && r.Lease != nil && !r.Lease.Leader {
			l.add(Fine, "process", "", "The process at %s does not hold the Lease %s of its %s, which %q does: ask that one.", p.url, r.Lease.Lease, r.Name, r.Lease.Holder)
		}
	}
	tells := len(l)
	f.aboutCalls(&l, p.page, volumes)
	f.aboutAttempts(&l, p.page, loops, key)
	if len(l) == tells {
		l.add(Fine, "process", "", "The process at %s works on nothing for the object, and has no failed attempt for it.", p.url)
	}
	return l
}

func (f *facts) aboutCalls(l *findings, page statusz.Page, volumes []string) {
	d := page.Driver
	if d == nil {
		return
	}
	if d.NotReady != "" {
		l.add(Blocked, "process", admin+" looks why the driver does not answer at its socket.", "The process has no connection to the driver: %s", sentence(d.NotReady))
	}
	for _, c := range d.Running {
		if c.Volume != "" && slices.Contains(volumes, c.Volume) {
			l.add(Waiting, "process", "The driver answers the call that is under way, or its deadline ends it.", "%s for %q is under way for %s.", c.Method, c.Volume, age(page.Now.Sub(c.Began)))
		}
	}
	for _, c := range d.Failed {
		if c.Volume != "" && slices.Contains(volumes, c.Volume) {
			l.add(Failing, "process", "", "%s for %q failed %s ago after %s with %s: %s", c.Method, c.Volume, age(page.Now.Sub(c.Began.Add(c.Took))), c.Took.Round(time.Millisecond), c.Code, sentence(c.Error))
			break // the newest; the others say the same
		}
	}
}

func (f *facts) aboutAttempts(l *findings, page statusz.Page, loops []string, key string) {
	for _, loop := range page.Loops {
		if !slices.Contains(loops, loop.Name) {
			continue
		}
		for _, r := range loop.Running {
			if r.Key == key {
				l.add(Waiting, "process", "", "An attempt is under way for %s (%s).", age(page.Now.Sub(r.Since)), loop.Name)
			}
		}
		for _, k := range loop.Failing {
			if k.Key != key {
				continue
			}
			when := "now"
			if k.Next.After(page.Now) {
				when = "in " + age(k.Next.Sub(page.Now))
			}
			l.add(Failing, "process", fmt.Sprintf("The process tries again %s; whoever is on call mends what the error says.", when),
				"%s in a row failed (%s), the last one with: %s The next try is %s.", count(k.Attempts, "attempt"), loop.Name, sentence(k.Error), when)
		}
	}
}
