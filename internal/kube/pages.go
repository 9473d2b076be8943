package kube

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// pageSize is how many objects [ListPages] reads at once.
const pageSize = 500

// ListPages is everything that get returns, which is called with the options of one page after
// another. Use it where nothing is watched.
func ListPages[T any](get func(metav1.ListOptions) (items []T, next string, err error)) ([]T, error) {
	var all []T
	o := metav1.ListOptions{Limit: pageSize}
	for {
		items, next, err := get(o)
		if err != nil {
			return nil, err
		}
		all = append(all, items...)
		if next == "" {
			return all, nil
		}
		o.Continue = next
	}
}
